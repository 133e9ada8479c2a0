"""An OpenAI-compatible HTTP server over `kvthaw.Scheduler`; needs the extra `serve`."""
