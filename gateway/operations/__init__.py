"""What operators do, defined once for the command line and for HTTP."""
