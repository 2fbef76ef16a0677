"""What each task takes, checked and measured before anything is held for. Pure."""
