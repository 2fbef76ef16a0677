"""Monthly statements and invoices, and the close of a month."""
