"""The planner: which workers should change their roles, by the load of each role."""
