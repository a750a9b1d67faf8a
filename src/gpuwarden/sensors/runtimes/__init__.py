"""What container runtimes say of their containers: their sockets, their state files, OCI specs."""
