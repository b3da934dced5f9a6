"""One set of variables for GDAL and obstore."""

from __future__ import annotations

from pathlib import Path

from tiledseg.raster.remote import advice, certificate_advice, gdal_options, store_options


def test_gdal_and_obstore_are_sent_to_one_server() -> None:
    """By Amazon's variable and by GDAL's."""
    url, gdal = {"AWS_ENDPOINT_URL": "http://h:9/"}, {"AWS_S3_ENDPOINT": "h:9", "AWS_HTTPS": "NO"}
    path_style = {"AWS_VIRTUAL_HOSTING": "FALSE"}
    assert {**gdal, **path_style}.items() <= gdal_options(url).items()
    assert not any(name.startswith("AWS") for name in gdal_options(gdal))
    for environment, endpoint, by_host in (
        (url, "http://h:9", False),
        ({"AWS_ENDPOINT_URL": "h"}, "https://h", False),
        ({**url, "AWS_VIRTUAL_HOSTING": "TRUE"}, "http://b.h:9", True),
        ({**gdal, **path_style}, "http://h:9", False),
        (gdal, "http://b.h:9", True),
        ({"AWS_S3_ENDPOINT": "h", **path_style}, "https://h", False),
        ({}, None, True),
    ):
        found = store_options("b", environment, 8, 1)
        assert (found.get("endpoint"), found["virtual_hosted_style_request"]) == (endpoint, by_host), environment
    assert store_options("b", {"AWS_NO_SIGN_REQUEST": "YES"}, 8, 1)["skip_signature"]


def test_a_users_own_limits_hold() -> None:
    assert gdal_options({}, 8)["GDAL_HTTP_LOW_SPEED_TIME"] == "8"
    assert "GDAL_HTTP_LOW_SPEED_TIME" not in gdal_options({"GDAL_HTTP_LOW_SPEED_TIME": "90"}, 8)


def test_what_was_read_is_named_and_never_shown() -> None:
    said = advice({"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "r", "HOME": "/"})
    assert said.endswith(": AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION")
    said = advice({"AWS_REGION": "r"})
    assert said.startswith("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_NO_SIGN_REQUEST, on every rank")
    assert "AWS_REGION are set" in said


def test_the_first_variable_that_names_authorities_is_handed_on() -> None:
    named = {"SSL_CERT_FILE": "/o.pem", "AWS_CA_BUNDLE": "/a.pem", "CURL_CA_BUNDLE": "/c.pem"}
    assert gdal_options(named)["GDAL_CURL_CA_BUNDLE"] == "/c.pem"
    assert gdal_options({"SSL_CERT_FILE": "/o.pem", "CURL_CA_BUNDLE": ""})["GDAL_CURL_CA_BUNDLE"] == "/o.pem"
    assert "GDAL_CURL_CA_BUNDLE" not in gdal_options({**named, "GDAL_CURL_CA_BUNDLE": "/g.pem"}), "its own decides"
    known = gdal_options({}).get("GDAL_CURL_CA_BUNDLE")
    assert known is None or Path(known).read_text().count("BEGIN CERTIFICATE") > 9
    assert certificate_advice(named).startswith("CURL_CA_BUNDLE is /c.pem; set CURL_CA_BUNDLE to the file (PEM)")
