"""The pages: one module of controllers for each part of the navigation."""
