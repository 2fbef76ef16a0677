"""Commands that compare models and devices before they are used: ``plan`` and ``try``."""
