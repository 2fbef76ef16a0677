"""Files of clients and outputs: where they come from, where they are kept, and for how long."""
