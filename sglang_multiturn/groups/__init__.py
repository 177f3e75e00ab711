"""Batches of groups for a trainer: what is started, kept, filtered, refilled and carried over."""
