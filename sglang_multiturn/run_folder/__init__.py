"""What a run leaves on disk: what it was asked, what runs at this moment, and what survives `kill -9`."""
