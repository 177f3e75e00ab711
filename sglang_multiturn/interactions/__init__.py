"""Who answers an assistant turn that calls no tool: a simulated user or an environment."""
