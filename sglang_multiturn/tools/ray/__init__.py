"""Tools in a Ray job: `execution: ray`, and limits that hold for all its worker processes."""
