"""`hpctrain submit`, `status` and `cancel`: scripts for schedulers, and the record of what was submitted."""
