from sglang_multiturn import BaseTool


class Echo(BaseTool):
    async def execute(self, instance_id):
        return "", 0.0, {}
