"""What the commands of `sac` print: tables, a picture, progress."""
