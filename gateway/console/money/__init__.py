"""Pages of prices, corrections, payments, months and usage."""
