"""Gateway and global scheduler."""
