"""Live traffic while everything is killed, stopped or cut off at random; then sums are compared."""
