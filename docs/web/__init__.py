"""What the site is made with: `docs/build.py` calls it."""
