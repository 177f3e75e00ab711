"""`sglang-multiturn doctor`: says before training what would go wrong in it. The list of checks is in docs/doctor.md."""
