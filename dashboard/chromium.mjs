// Unpacks the Chromium that npm brought, with its libraries and fonts, into the folder that TMPDIR names; prints its path.
// For machines without a browser: it needs neither root nor anything of the system but the C library.
process.env.AWS_LAMBDA_JS_RUNTIME = "nodejs24.x"; // what makes it unpack the libraries, too
const { default: chromium } = await import("@sparticuz/chromium");
console.log(await chromium.executablePath());
