from sglang_multiturn import BaseTool


class Echo(BaseTool):
    """Says it back, one day."""
