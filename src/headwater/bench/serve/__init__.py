"""Load on a running stack: what is sent, what comes back when, and what that means."""
