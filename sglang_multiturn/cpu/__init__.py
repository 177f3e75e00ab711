"""What stands in for a GPU, so that demos and tests run the real software on a plain CPU."""
