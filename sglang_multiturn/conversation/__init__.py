"""The parts of one conversation, whose states `rollout` walks through."""
