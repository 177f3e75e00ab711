from sglang_multiturn import BaseTool


class Echo(BaseTool):
    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema)
        self.index = config["index_path"]

    async def execute(self, instance_id, parameters, **kwargs):
        return parameters["text"], 0.0, {}
