"""Between messages and tokens: the chat template (`template`, `byte_chatml`) and tool-call parsing (`parsing`)."""
