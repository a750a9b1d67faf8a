"""Who may use the GPUs: what schedulers, orchestrators and systemd say."""
