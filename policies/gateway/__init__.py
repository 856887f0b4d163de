"""The gateway: programs that call the policy by themselves, over HTTP, as agents that can be trained."""
