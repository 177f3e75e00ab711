"""The side that verl sees: its agent loop, what one worker keeps, training rows, and every patch of verl.

Only this package and `sglang_multiturn.cpu` import verl, and nothing here is imported before verl asks for it:
`hook` runs inside `import verl` itself and must stay light.
"""
