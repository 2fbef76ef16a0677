"""Live updates: what pages follow, sampled once for all who follow it, in one stream a browser."""
