"""One address before several controllers."""
