"""Pages about the installation itself: settings, the API's reference, versions and licences."""
