"""Where units are scored: in this process, or on the machines of a Ray cluster; the bytes are the same."""
