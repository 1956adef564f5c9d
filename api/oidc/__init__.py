"""Sign-in through an OpenID provider: the operator's file, and the requests to the provider.

``api.signin`` has the routes, and turns a person's claims into members of projects.
"""
