"""What `self.log` collects, and how it is reduced over ranks."""
