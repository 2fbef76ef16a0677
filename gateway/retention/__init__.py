"""What is deleted because of its age, how often, and by which process."""
