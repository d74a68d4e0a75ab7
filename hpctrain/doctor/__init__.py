"""`hpctrain doctor`: checks the machine, each rank's part of it, and the ways between them, before a job is trained."""
