"""Plan a script's training on a GPU without one: dev/plan.md."""
