"""What user code keeps between runs of a step."""
