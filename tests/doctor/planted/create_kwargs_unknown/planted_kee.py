from sglang_multiturn import BaseTool


class Echo(BaseTool):
    async def create(self, instance_id, key="a"):
        self.key = key
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        return parameters["text"], 0.0, {}
