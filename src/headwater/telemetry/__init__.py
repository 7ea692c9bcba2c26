"""OpenTelemetry traces and metrics: set up once per process, free of cost when not configured."""
