"""The rows of a project besides its jobs: keys, tokens, webhooks, quotas, the audit log."""
