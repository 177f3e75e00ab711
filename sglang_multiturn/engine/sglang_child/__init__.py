"""What runs in SGLang's own process (`main`, `launch`, `serve`, `weights`), and the `messages` it speaks."""
