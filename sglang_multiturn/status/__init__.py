"""`sglang-multiturn status`: what is in flight now, or was when a process ended."""
