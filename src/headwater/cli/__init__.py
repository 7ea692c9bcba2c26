"""The command `headwater`, one file per group of subcommands."""
