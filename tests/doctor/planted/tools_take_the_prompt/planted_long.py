from sglang_multiturn import BaseTool


class Echo(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return parameters["text"], 0.0, {}
