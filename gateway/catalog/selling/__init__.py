"""What models cost at any moment: list prices, price overrides, discounts and batch prices."""
