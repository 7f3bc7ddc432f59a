"""Side-by-side speed; nothing here is imported by the application."""
