"""What a project has besides its jobs: keys, tokens, webhooks, quotas, the audit log."""
