"""The vLLM side: whole weight refreshes of policy and draft into a running engine, rollouts, accept statistics."""
