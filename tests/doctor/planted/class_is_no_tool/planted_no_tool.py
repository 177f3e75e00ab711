class Echo:
    pass
