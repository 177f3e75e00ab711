"""Tools: the contract (`base`), how a YAML becomes tools (`registry`), and one conversation's use of them (`session`)."""
