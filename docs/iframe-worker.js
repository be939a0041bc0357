// Browsers refuse to start a Worker on a page that was opened from disk. There, the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const element = document.createElement("iframe");
      element.hidden = true;
      document.body.append(element);
      const frame = (this.frame = element.contentWindow);
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = frame.document.createElement("script");
          Object.assign(script, { src: source, onload: resolve, onerror: reject });
          frame.document.head.append(script);
        });
      frame.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      frame.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      this.loaded = load(url);
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.dispatchEvent(new this.frame.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.frameElement.remove();
    }
  };
}
