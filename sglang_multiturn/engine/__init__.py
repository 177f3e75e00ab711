"""Engines: token ids in, token ids with log-probabilities out. They know nothing about text or chat."""
